-- Inserts orders and their events; event is NULL for an order without one. One statement outside a block is one
-- transaction. Returns the ids of those it inserted, with the server process. All sessions take keys in the same order,
-- so that two of these statements cannot deadlock.
WITH n AS (
    SELECT * FROM ROWS FROM (
        pg_catalog.unnest($1::uuid[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::bytea[]),
            pg_catalog.unnest($4::bytea[]),
        pg_catalog.unnest($5::bigint[]), pg_catalog.unnest($6::bigint[]), pg_catalog.unnest($7::text[]),
            pg_catalog.unnest($8::text[]),
        pg_catalog.unnest($9::bigint[]), pg_catalog.unnest($10::bytea[]), pg_catalog.unnest($11::timestamptz[]),
            pg_catalog.unnest($12::text[]),
        pg_catalog.unnest($13::uuid[]), pg_catalog.unnest($14::text[]), pg_catalog.unnest($15::text[]),
            pg_catalog.unnest($16::text[]),
        pg_catalog.unnest($17::text[]), pg_catalog.unnest($18::text[])
    ) AS n (
        id, user_id, idem_key, idem_fp, fence, amount, currency, status, resp_status, resp_body, created_at, pay_with,
        event, aggregate_type, aggregate_id, event_type, payload, headers
    )
), o AS (
    INSERT INTO orders (id, user_id, idem_key, idem_fp, fence, amount, currency, status, resp_status, resp_body,
        created_at, pay_with)
    SELECT id, user_id, idem_key, idem_fp, fence, amount, currency, status, nullif(resp_status, 0)::smallint,
        resp_body, created_at, nullif(pay_with, '')
    FROM n ORDER BY user_id, idem_key
    ON CONFLICT DO NOTHING
    RETURNING id
), e AS (
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
    SELECT event, aggregate_type, aggregate_id, event_type, payload::jsonb, nullif(headers, '')::jsonb
    FROM n WHERE event IS NOT NULL AND id IN (SELECT id FROM o)
)
SELECT id, pg_catalog.pg_postmaster_start_time() FROM o
