"""Commands on a whole store: `backup`, `bench`, `doctor`, `migrate`, `purge`."""
