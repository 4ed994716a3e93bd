package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// jsonLine is what LineWriter prints. The names and their order are contract.
type jsonLine struct {
	ID      string          `json:"id"`
	Type    string          `json:"type"`
	Subject string          `json:"subject"`
	Time    string          `json:"time"`
	Data    json.RawMessage `json:"data"`
	Stream  string          `json:"stream"`
	EntryID string          `json:"entry_id"`
	Headers json.RawMessage `json:"headers,omitempty"`
}

// timeFormat is how posthaste writes times into streams.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// LineWriter returns a handler that writes one JSON line per event to w, in a single Write, and flushes w if it has a
// method Flush() error, before the event is acknowledged. An event whose payload is not JSON is Permanent; an error of
// w is Unavailable. w is used by one goroutine at a time.
func LineWriter(w io.Writer) Handler {
	var mu sync.Mutex
	torn := false
	flusher, _ := w.(interface{ Flush() error })
	return func(_ context.Context, ev Event) error {
		b, err := encodeJSONLine(ev)
		if err != nil {
			return Permanent(err)
		}
		mu.Lock()
		defer mu.Unlock()
		if torn { // half a line was written: end it, so that this one is whole
			b = append([]byte{'\n'}, b...)
		}
		if _, err := w.Write(b); err != nil {
			torn = true
			return Unavailable(fmt.Errorf("write the line of event %s: %w", ev.ID, err))
		}
		torn = false
		if flusher != nil {
			if err := flusher.Flush(); err != nil {
				return Unavailable(fmt.Errorf("flush the line of event %s: %w", ev.ID, err))
			}
		}
		return nil
	}
}

func encodeJSONLine(ev Event) ([]byte, error) {
	l := jsonLine{ID: ev.ID, Type: ev.Type, Subject: ev.Subject, Data: ev.Data, Stream: ev.Stream, EntryID: ev.EntryID}
	if !ev.Time.IsZero() {
		l.Time = ev.Time.UTC().Format(timeFormat)
	}
	if len(ev.Headers) > 0 {
		l.Headers = json.RawMessage(ev.headers)
	}
	if len(l.Data) == 0 {
		l.Data = json.RawMessage("null")
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(l); err != nil {
		return nil, fmt.Errorf("the payload of event %s is not JSON: %w", ev.ID, err)
	}
	return buf.Bytes(), nil
}
