"""Cases of corruption: their rulings, reports and pages."""
