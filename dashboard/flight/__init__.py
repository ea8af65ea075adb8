"""Flight-recorder files, read: ``kvlens inspect`` and ``kvlens replay``."""
