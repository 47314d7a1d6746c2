"""Problems, environments and rewards."""
