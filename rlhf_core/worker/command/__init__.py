"""A trainer that is another program: started, followed and ended by a worker that beats for each of its ranks."""
