"""Training: recipes, the Lightning module, runs that survive anything."""
