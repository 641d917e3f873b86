"""Reports: tables and plots, made from records and logs alone."""
