"""Ranks of wanted images are those of a sorted list, counted and sorted, on any device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robustmetric import places
from robustmetric.squares import keys_of

pytestmark = pytest.mark.kernels


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.5, 2.0]) | st.floats(0, 4, width=32), min_size=2),
    st.data(),
    st.sampled_from([0, 2, 10, 1000]),
)
def test_places_are_those_of_a_sorted_list(values: list[float], data: st.DataObject, few: int) -> None:
    chosen = st.sets(st.integers(0, len(values) - 1), min_size=1)
    ranking = sorted(range(len(values)), key=lambda i: (values[i], i))
    wanted = sorted(data.draw(chosen))
    expected = sorted(ranking.index(i) + 1 for i in wanted)
    near, position = torch.tensor(values).abs(), torch.tensor(wanted)
    keys = keys_of(near[position], position).sort().values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_FEW", few)
        assert places.places_of_one(near.numpy(), keys.numpy()).tolist() == expected
    # What another device does instead.
    assert places.places_by_keys(near[None], keys[None].flip(1))[0].tolist() == expected
