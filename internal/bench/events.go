package bench

import (
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// writers is how many connections insert at once.
const writers = 8

// Contents of the events that a benchmark writes.
const (
	aggregateType = "bench"
	eventType     = "bench.event"
)

// eventID is the id of event n; eventNumber is its inverse.
func eventID(n int) uuid.UUID {
	var id uuid.UUID
	id[6], id[8] = 0x70, 0x80
	for i := range 6 {
		id[15-i] = byte(n >> (8 * i)) //nolint:gosec // one byte of it
	}
	return id
}

func eventNumber(id string) (n int, ok bool) {
	if len(id) != 36 {
		return 0, false
	}
	v, err := strconv.ParseUint(id[24:], 16, 48)
	return int(v), err == nil && eventID(int(v)).String() == id
}

// payloadOf is a JSON object of about size bytes, which does not compress.
func payloadOf(size int) string {
	pad := make([]byte, 0, size)
	for len(pad) < size-len(`{"pad": ""}`) {
		pad = append(pad, uuid.NewString()...)
	}
	return fmt.Sprintf(`{"pad": %q}`, pad[:max(0, size-len(`{"pad": ""}`))])
}

// insertMany writes events %[1]d … %[2]d in transactions of %[4]d, with the aggregate type %[5]s. insertPaced writes
// every %[4]dth of them, each at its time: %[6]d is due at the beginning, and %[5]g are due per second.
const (
	sqlID       = `('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid` // see eventID
	insertEvent = `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)`
	insertMany  = `DO $$ BEGIN FOR i IN %[1]d..%[2]d BY %[4]d LOOP ` + insertEvent + `
	SELECT ` + sqlID + `, %[5]s, n::text, '` + eventType + `', '%[3]s'
	FROM generate_series(i, least(i + %[4]d - 1, %[2]d)) n; COMMIT; END LOOP; END $$`
	insertPaced = `DO $$ DECLARE began timestamptz := clock_timestamp(); BEGIN FOR n IN %[1]d..%[2]d BY %[4]d LOOP
	PERFORM pg_sleep(greatest(0, (n - %[6]d) / %[5]g::float8 - extract(epoch FROM clock_timestamp() - began)));
	` + insertEvent + ` VALUES (` + sqlID + `, '` + aggregateType + `', n::text, '` + eventType + `', '%[3]s');
	COMMIT; END LOOP; END $$`
)
