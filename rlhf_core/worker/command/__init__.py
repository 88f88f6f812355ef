"""External trainers: a worker per rank starts, follows and stops the program and sends heartbeats for its rank."""
