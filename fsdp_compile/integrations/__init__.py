"""What frameworks need to know of a model that shards itself. Each module imports its framework, an optional one."""
