"""The history of all runs in a SQL database: SQLite on one machine, PostgreSQL for a team. Only this package uses
SQLAlchemy.

tables         tables and views (docs/database.md describes every column)
database       opening a database safely: file systems, locks, errors that name the remedy
migrate        bringing a schema up to date
batch          data of one round of ingestion
store          leases, and batches in one transaction each
writers        rows of a batch
queries        reads: one function per query; plain data comes back, never a row or a session
saved_queries  files of SQL with arguments (``rlhf sql NAME``)
read_only      guards that keep the SQL of a user from changing anything
sql_limits     limits of time and size for the SQL of a user
renamed        names that a migration changed, for the advice to saved SQL
"""
