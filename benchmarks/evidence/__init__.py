"""The evidence: which networks are trained and evaluated, what makes them, and the page that shows them."""
