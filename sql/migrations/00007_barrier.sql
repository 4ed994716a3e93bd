-- +goose Up

-- The slot was moved, or made, without waiting until everything that was committed before its position is visible: a commit
-- held back by synchronous replication is then neither swept nor streamed. Before the slot is streamed every transaction older
-- than this one has to have ended. Noted before the slot moves, for whoever leads by then; NULL if there is nothing to wait for,
-- the greatest bigint if it is not known which transaction that is, and any later one will do.
ALTER TABLE relay_state ADD COLUMN slot_barrier bigint;

-- +goose Down
ALTER TABLE relay_state DROP COLUMN slot_barrier;
