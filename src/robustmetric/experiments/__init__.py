"""Experiments: the paper's tables and figures as data, the cells they are made of, and what runs them."""
