"""The commands of ``kvlens``, one file each.

Each adds its arguments and runs what another package does. A file here imports only the
standard library and telemetry at its top: what a command needs beyond that it imports when
it runs, so that ``kvlens --help`` works without any extra.
"""
