-- A range of time in the log: after the first mark, up to the second. $3 is an aggregate id, which limits it to one
-- part (-1: every part).
SELECT coalesce((SELECT id FROM outbox_mark WHERE at < $1 ORDER BY id DESC LIMIT 1), 0),
       coalesce((SELECT id FROM outbox_mark WHERE at <= $2 ORDER BY id DESC LIMIT 1), 0),
       coalesce(outbox_part($3), (-1)::smallint)
