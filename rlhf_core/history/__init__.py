"""The history of all runs in a SQL database: SQLite on one machine, PostgreSQL for a team. SQLAlchemy lives here.

tables    what there is to know, as tables; migrations import only this
database  opening a database safely: file systems, locks, errors in words
migrate   bringing a schema up to date
metric_rows  metric rows in bulk, past SQLAlchemy
batch     what one round of ingestion brings
store     writes: leases, and batches in one transaction each
queries   reads: one function per question; plain data comes back, never a row or a session
"""
