-- The newest mark of part $1.
SELECT n.id FROM outbox_mark_until($1::smallint, 9223372036854775807) n
