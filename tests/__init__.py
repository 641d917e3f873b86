"""The tests; a package so that they find `tests.helpers`."""
