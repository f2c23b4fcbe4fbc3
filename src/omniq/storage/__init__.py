"""Where tasks live: the driver contract (`base`) and its drivers."""
