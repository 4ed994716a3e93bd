package cdc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// wire builds pgoutput messages.
type wire struct{ bytes.Buffer }

func msg(kind byte) *wire {
	w := &wire{}
	w.WriteByte(kind)
	return w
}

func (w *wire) u8(v byte) *wire    { w.WriteByte(v); return w }
func (w *wire) u16(v uint16) *wire { w.Write(binary.BigEndian.AppendUint16(nil, v)); return w }
func (w *wire) u32(v uint32) *wire { w.Write(binary.BigEndian.AppendUint32(nil, v)); return w }
func (w *wire) u64(v uint64) *wire { w.Write(binary.BigEndian.AppendUint64(nil, v)); return w }
func (w *wire) str(s string) *wire { w.WriteString(s); w.WriteByte(0); return w }
func (w *wire) text(s string) *wire {
	w.u8('t').u32(uint32(len(s)))
	w.WriteString(s)
	return w
}

func begin(commit uint64) []byte { return msg('B').u64(commit).u64(1_000_000).u32(77).Bytes() }
func end(commit uint64) []byte   { return msg('C').u8(0).u64(commit).u64(commit + 8).u64(0).Bytes() }

func relationMsg(oid uint32, schema, table string, cols ...string) []byte {
	w := msg('R').u32(oid).str(schema).str(table).u8('d').u16(uint16(len(cols)))
	for _, c := range cols {
		w.u8(0).str(c).u32(25).u32(0xffffffff)
	}
	return w.Bytes()
}

const testID = "01890a5d-ac96-774b-bcce-b302099a8057"

var allColumns = append(columnNames[:], "created_at")

func goodRow(oid uint32) *wire {
	return msg('I').u32(oid).u8('N').u16(8).text(testID).text("42").text("order").text("o-1").text("order.created").
		text(`{"a": 1}`).text(`{"h": "x"}`).text("2026-11-20 23:50:00.12345+00")
}

func feed(t *testing.T, d *decoder, msgs ...[]byte) decoded {
	t.Helper()
	var what decoded
	for i, m := range msgs {
		var err error
		if what, err = d.decode(m); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	return what
}

func TestDecodeCopiesARowOutOfTheBuffer(t *testing.T) {
	t.Parallel()
	d := newDecoder("public", "outbox")
	buf := goodRow(1).Bytes()
	if what := feed(t, d, begin(100), relationMsg(1, "public", "outbox", allColumns...), buf); what != inserted {
		t.Fatalf("got %d, want a row", what)
	}
	for i := range buf {
		buf[i] = 'X' // what the next read does to it
	}
	want := outbox.Row{
		Record: outbox.Record{
			ID: uuid.MustParse(testID), Seq: 42, AggregateType: "order", AggregateID: "o-1", Type: "order.created",
			Time: time.Date(2000, 1, 1, 0, 0, 1, 0, time.UTC),
		},
		Commit: 100, XID: 77,
	}
	got := d.row
	if string(got.Payload) != `{"a": 1}` || string(got.Headers) != `{"h": "x"}` {
		t.Errorf("payload %s, headers %s", got.Payload, got.Headers)
	}
	got.Payload = append(got.Payload, "overflow"...)
	if string(got.Headers) != `{"h": "x"}` {
		t.Error("appending to the payload writes into the headers")
	}
	got.Payload, got.Headers = nil, nil
	if got.ID != want.ID || got.Seq != want.Seq || got.AggregateType != want.AggregateType ||
		got.AggregateID != want.AggregateID || got.Type != want.Type || !got.Time.Equal(want.Time) ||
		got.Commit != want.Commit || got.XID != want.XID {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if what := feed(t, d, end(100)); what != committed || d.end != 108 {
		t.Errorf("got %d, end %s", what, d.end)
	}
}

func TestDecodeFindsColumnsByNameAndIgnoresOthers(t *testing.T) {
	t.Parallel()
	d := newDecoder("app", "outbox")
	cols := []string{"extra", "payload", "event_type", "aggregate_id", "aggregate_type", "seq", "id", "more"}
	row := msg('I').u32(9).u8('N').u16(8).u8('u').text("{}").text("t").text("").text("a").
		text("7").text(testID).u8('b').u32(2).u16(1)
	other := msg('I').u32(10).u8('N').u16(1).text("x")
	what := feed(t, d, relationMsg(9, "app", "outbox", cols...), relationMsg(10, "public", "outbox", "id"), begin(5),
		msg('Y').u32(1).str("a").str("b").Bytes(), msg('O').u64(1).str("o").Bytes(),
		msg('M').u8(1).u64(3).str("p").u32(0).Bytes(), msg('U').u32(9).Bytes(), msg('D').u32(9).Bytes(),
		msg('T').u32(1).u8(0).u32(9).Bytes(), msg('A').u32(1).u32(2).Bytes(),
		other.Bytes(), row.Bytes())
	if what != inserted || d.row.Seq != 7 || d.row.AggregateType != "a" || d.row.AggregateID != "" ||
		d.row.Headers != nil {
		t.Errorf("got %d %+v", what, d.row)
	}
}

func TestDecodeNamesWhatItCannotUse(t *testing.T) {
	t.Parallel()
	head := [][]byte{relationMsg(1, "public", "outbox", allColumns...), begin(100)}
	short := goodRow(1).Bytes()
	row := func(i int, put func(*wire)) []byte {
		w := msg('I').u32(1).u8('N').u16(8)
		for n, v := range []string{testID, "42", "order", "o-1", "t", "{}", "{}", "2026-01-01 00:00:00+00"} {
			if n == i {
				put(w)
				continue
			}
			w.text(v)
		}
		return w.Bytes()
	}
	for name, c := range map[string]struct {
		msgs [][]byte
		want string
	}{
		"column missing": {
			[][]byte{relationMsg(1, "public", "outbox", "id", "seq", "aggregate_type", "aggregate_id", "event_type")},
			`"payload"`,
		},
		"null":            {append(head, row(3, func(w *wire) { w.u8('n') })), `"aggregate_id" is NULL`},
		"unchanged toast": {append(head, row(5, func(w *wire) { w.u8('u') })), `"payload" was left out`},
		"binary":          {append(head, row(0, func(w *wire) { w.u8('b').u32(2).u16(1) })), "binary"},
		"unknown kind":    {append(head, row(7, func(w *wire) { w.u8('z') })), "column kind"},
		"negative length": {append(head, row(5, func(w *wire) { w.u8('t').u32(0xffffffff) })), "cut short"},
		"id": {
			append(head, row(0, func(w *wire) { w.text("{01890a5d-ac96-774b-bcce-b302099a80}") })),
			"not a UUID",
		},
		"seq":               {append(head, row(1, func(w *wire) { w.text("4x") })), "not a number"},
		"empty type":        {append(head, row(2, func(w *wire) { w.text("") })), "aggregate_type"},
		"empty payload":     {append(head, row(5, func(w *wire) { w.text("") })), "payload"},
		"cut short":         {append(head, short[:len(short)-3]), "cut short"},
		"too long":          {append(head, append(slices.Clone(short), 0)), "1 bytes too many"},
		"empty":             {[][]byte{{}}, "empty message"},
		"unknown message":   {[][]byte{{'?'}}, "not part of protocol 1"},
		"stream start":      {[][]byte{msg('S').u32(1).u8(1).Bytes()}, "not part of protocol 1"},
		"unknown relation":  {[][]byte{begin(1), goodRow(3).Bytes()}, "not announced"},
		"row outside":       {[][]byte{head[0], goodRow(1).Bytes()}, "outside a transaction"},
		"begin in begin":    {[][]byte{begin(1), begin(2)}, "begins inside"},
		"begin at zero":     {[][]byte{begin(0)}, "without a commit position"},
		"commit outside":    {[][]byte{end(1)}, "does not belong"},
		"commit of another": {[][]byte{begin(1), end(2)}, "does not belong"},
		"number of columns": {[][]byte{
			relationMsg(1, "public", "outbox", append(slices.Clone(allColumns), "x")...),
			begin(1), goodRow(1).Bytes(),
		}, "8 columns"},
		"old tuple in insert":   {append(head, msg('I').u32(1).u8('O').Bytes()), "tuple tag"},
		"begin is cut short":    {[][]byte{begin(1)[:9]}, "cut short"},
		"relation is cut short": {[][]byte{head[0][:30]}, "cut short"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDecoder("public", "outbox")
			var err error
			for i, m := range c.msgs {
				if _, err = d.decode(m); err != nil && i < len(c.msgs)-1 {
					t.Fatalf("message %d: %v", i, err)
				}
			}
			var slot *outbox.SlotError
			if !errors.As(err, &slot) || slot.Reason != outbox.ReasonDecode || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q with reason decode", err, c.want)
			}
		})
	}
}

func TestNamesAreSharedUpToABound(t *testing.T) {
	t.Parallel()
	in := interner{}
	for i := range internMax + 10 {
		in.get([]byte{byte(i), byte(i >> 8)})
	}
	if len(in) != internMax {
		t.Errorf("%d names kept, want %d", len(in), internMax)
	}
}

// FuzzDecode feeds a stream of messages, each behind a two-byte length. There is never a panic, and never a row without
// an identity.
func FuzzDecode(f *testing.F) {
	join := func(msgs ...[]byte) []byte {
		var b []byte
		for _, m := range msgs {
			b = append(binary.BigEndian.AppendUint16(b, uint16(len(m))), m...)
		}
		return b
	}
	rel := relationMsg(1, "public", "outbox", allColumns...)
	f.Add(join(begin(100), rel, goodRow(1).Bytes(), end(100)))
	f.Add(join(rel, begin(1), goodRow(1).Bytes(), goodRow(2).Bytes()))
	f.Add(join(relationMsg(2, "public", "other", "x"), begin(1), msg('I').u32(2).u8('N').u16(1).text("x").Bytes(),
		end(1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		d := newDecoder("public", "outbox")
		for len(b) >= 2 {
			n := min(int(binary.BigEndian.Uint16(b)), len(b)-2)
			m := bytes.Clone(b[2 : 2+n])
			b = b[2+n:]
			what, err := d.decode(m)
			if err != nil {
				if what != nothing {
					t.Fatalf("%d together with %v", what, err)
				}
				return
			}
			if what != inserted {
				continue
			}
			row := d.row
			if row.Marker() || row.AggregateType == "" || len(row.Payload) == 0 || row.Commit == 0 || row.End != 0 {
				t.Fatalf("zero-valued row %+v", row)
			}
			before := string(row.Payload) + row.AggregateID + row.Type + string(row.Headers)
			for i := range m {
				m[i] ^= 0x55
			}
			if before != string(row.Payload)+row.AggregateID+row.Type+string(row.Headers) {
				t.Fatal("the row aliases the message")
			}
		}
	})
}

// BenchmarkDecode is the decoder alone: BEGIN, one row of 300 bytes, COMMIT.
func BenchmarkDecode(b *testing.B) {
	d := newDecoder("public", "outbox")
	if _, err := d.decode(relationMsg(1, "public", "outbox", allColumns...)); err != nil {
		b.Fatal(err)
	}
	msgs := [][]byte{begin(100), goodRow(1).Bytes(), end(100)}
	b.ReportAllocs()
	for b.Loop() {
		for _, m := range msgs {
			if _, err := d.decode(m); err != nil {
				b.Fatal(err)
			}
		}
	}
}
