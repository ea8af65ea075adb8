"""The flight recorder's files: format, writer and reader."""
