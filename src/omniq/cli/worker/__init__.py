"""`omniq worker`, in one process or several."""
