"""How every other layer looks at and touches a graph."""
