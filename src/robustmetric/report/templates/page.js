"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const all = (what, inside = document) => Array.from(inside.querySelectorAll(what));
  const FIRST = 12;

  for (const hidden of all("form.filters, .theme")) hidden.hidden = false;
  at("theme").addEventListener("change", (event) => {
    const chosen = event.target.value;
    if (chosen) document.documentElement.dataset.theme = chosen;
    else delete document.documentElement.dataset.theme;
  });

  // Tables: a button in each head sorts by its column, again to turn the order round.
  for (const table of all("table.sortable")) {
    const body = table.tBodies[0];
    const heads = all("th[data-kind]", table.tHead);
    for (const head of heads) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const place = head.cellIndex;
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => {
          const text = row.cells[place].dataset.value;
          return text === "" || text === undefined ? NaN : Number(text);
        };
        const rows = Array.from(body.rows);
        rows.sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
          return up ? x - y : y - x;
        });
        body.append(...rows);
      });
    }
  }

  // The gallery: filtered, sorted, the first ones at once and the others on demand.
  const shots = at("shots");
  if (shots) {
    const cards = all(".shot", shots);
    const filters = { attack: at("by-attack"), why: at("by-why"), network: at("by-network") };
    let shown = FIRST;
    const update = () => {
      const key = at("sort").value;
      cards.sort((a, b) => {
        const order = a.dataset.order - b.dataset.order;
        if (key === "harm") return b.dataset.harm - a.dataset.harm || order;
        return a.dataset[key] - b.dataset[key] || order;
      });
      shots.append(...cards);
      const wanted = cards.filter((card) =>
        Object.entries(filters).every(([name, box]) => !box || !box.value || card.dataset[name] === box.value),
      );
      const visible = new Set(wanted.slice(0, shown));
      for (const card of cards) card.hidden = !visible.has(card);
      at("count").textContent = `${visible.size} of ${wanted.length} queries shown`;
      const left = wanted.length - visible.size;
      at("more").hidden = left === 0;
      at("more").textContent = `Show ${left} more`;
    };
    for (const box of [...Object.values(filters), at("sort")]) {
      if (box) box.addEventListener("change", () => { shown = FIRST; update(); });
    }
    at("more").addEventListener("click", () => {
      const next = shown;
      shown = Infinity;
      update();
      const card = all(".shot:not([hidden])", shots)[next];
      if (card) { card.tabIndex = -1; card.focus(); }
    });
    update();
  }

  // On paper nothing can be opened; cards that are hidden are shown there by the style.
  window.addEventListener("beforeprint", () => {
    for (const part of all("details")) part.open = true;
  });

  const moves = at("map-attack");
  if (moves) {
    const update = () => {
      for (const group of all(".plot g[id*='-moves-']")) {
        const wanted = !moves.value || group.id.endsWith(`-moves-${moves.value}`);
        group.setAttribute("visibility", wanted ? "visible" : "hidden");
      }
    };
    moves.selectedIndex = 1; // all arrows at once are a tangle
    moves.addEventListener("change", update);
    update();
  }
})();
