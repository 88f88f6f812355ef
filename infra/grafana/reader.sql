-- A role that reads the history and can do nothing else: for Grafana and for people's own tools.
--
--     psql "$RLHF_DATABASE_URL" -f infra/grafana/reader.sql
--     psql "$RLHF_DATABASE_URL" -c '\password rlhf_reader'
--
-- Run it as the role that owns the tables: what later migrations add is then readable too. It may be run again.

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'rlhf_reader') THEN
        CREATE ROLE rlhf_reader LOGIN;
    END IF;
END
$$;

-- A question that a dashboard asks every minute must not run for an hour.
ALTER ROLE rlhf_reader SET default_transaction_read_only = on;
ALTER ROLE rlhf_reader SET statement_timeout = '30s';

GRANT USAGE ON SCHEMA public TO rlhf_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO rlhf_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO rlhf_reader;
