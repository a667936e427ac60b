"""Stand-ins for libraries and devices that are not here, faithful at the boundary that the project calls."""
