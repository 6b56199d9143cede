"""Load over HTTP: locust scenarios, the field's own clients, a soak, and the report that they write together."""
