"""One page per kind of incident; shipped with the dashboard, which shows them."""
