"""Commands on queues and groups: `queues`, `pause`, `resume`, `groups`, `top`."""
