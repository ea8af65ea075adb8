"""The boards, one module each; every module has ``build() -> Dashboard``."""
