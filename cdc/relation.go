package cdc

import (
	"errors"
	"fmt"
)

// column is the role of a column of the outbox table.
type column uint8

const (
	colID column = iota
	colSeq
	colAggregateType
	colAggregateID
	colEventType
	colPayload
	colHeaders // optional
	columns
	colOther = columns
)

// columnNames maps columns by name: columns may be added, moved and dropped while streaming. created_at is not needed,
// because streamed events have the time of their commit.
var columnNames = [columns]string{
	"id", "seq", "aggregate_type", "aggregate_id", "event_type", "payload", "headers",
}

// values holds the text of each column of one row, aliasing the receive buffer; nil is NULL.
type values [columns][]byte

// relation is the role of each column of an announced table. Other tables are nil in the cache.
type relation struct {
	cols []column
}

// relation reads a RELATION message, which the server sends before a table's first row on a connection, and again after
// DDL, VACUUM, ANALYZE, and every change of the publication.
func (d *decoder) relation(c *cursor) (decoded, error) {
	oid := c.u32()
	schema, table := c.cstring(), c.cstring()
	_ = c.u8() // replica identity
	n := int(c.u16())
	ours := string(schema) == d.schema && string(table) == d.table
	rel := &relation{}
	var have [columns]bool
	for range n {
		_ = c.u8() // part of the key
		col := columnOf(c.cstring())
		_, _ = c.u32(), c.u32() // type, type modifier
		if c.short {
			return nothing, nil
		}
		rel.cols = append(rel.cols, col)
		if col != colOther {
			have[col] = true
		}
	}
	if c.short {
		return nothing, nil
	}
	if !ours {
		d.relations[oid] = nil
		return nothing, nil
	}
	for col := colID; col < colHeaders; col++ {
		if !have[col] {
			// A column list in the publication does this too.
			return nothing, fmt.Errorf("the stream of table %q has no column %q", d.table, columnNames[col])
		}
	}
	d.relations[oid] = rel
	return announced, nil
}

func columnOf(name []byte) column {
	for i, n := range columnNames {
		if string(name) == n {
			return column(i)
		}
	}
	return colOther
}

// tuple reads a row's columns into v.
func (r *relation) tuple(c *cursor, v *values) error {
	n := int(c.u16())
	if c.short {
		return nil
	}
	if n != len(r.cols) {
		return fmt.Errorf("row has %d columns, the table was announced with %d", n, len(r.cols))
	}
	for _, col := range r.cols {
		kind := c.u8()
		var val []byte
		switch kind {
		case 'n', 'u':
		case 't', 'b':
			// A length above 2^31 is negative as the wire means it, and take refuses it.
			val = c.take(int(int32(c.u32()))) //nolint:gosec // as above
		default:
			return fmt.Errorf("column kind %q", kind)
		}
		if c.short {
			return nil
		}
		if col == colOther {
			continue
		}
		if err := usable(kind, col); err != nil {
			return err
		}
		v[col] = val
	}
	return nil
}

// usable refuses what is not text where text is needed.
func usable(kind byte, col column) error {
	switch {
	case kind == 't':
		return nil
	case kind == 'n' && col >= colHeaders:
		return nil
	case kind == 'n':
		return fmt.Errorf("column %q is NULL", columnNames[col])
	case kind == 'u': // cannot occur in an insert
		return fmt.Errorf("column %q was left out as unchanged", columnNames[col])
	default:
		return errors.New("column " + columnNames[col] + " is in binary format; the text format was requested")
	}
}
