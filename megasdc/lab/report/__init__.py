"""Reports: comparisons, plans, step times and runs, as text for a terminal and as HTML pages."""
