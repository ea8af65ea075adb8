"""``kvlens demo``: a real engine with the defect, observed, and with it corrected."""
