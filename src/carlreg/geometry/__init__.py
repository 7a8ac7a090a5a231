"""Points and maps in unit coordinates. Needs torch alone."""
