package deliver

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"slices"

	"posthaste/consumer"
)

// extension matches the names that CloudEvents allow for extension attributes. Reserved ones have a meaning.
var (
	extension = regexp.MustCompile(`^[a-z0-9]{1,20}$`)
	reserved  = []string{
		"specversion", "id", "source", "type", "subject", "time", "data", "datacontenttype", "dataschema",
		"traceparent",
	}
)

// encode returns an event as a structured CloudEvent in JSON. A header is an extension attribute; one whose name is
// reserved or not allowed is left out.
func encode(ev consumer.Event) ([]byte, error) {
	attributes := map[string]any{"specversion": "1.0", "id": ev.ID, "source": ev.Source, "type": ev.Type}
	for name, value := range ev.Headers {
		if extension.MatchString(name) && !slices.Contains(reserved, name) {
			attributes[name] = value
		}
	}
	if ev.Subject != "" {
		attributes["subject"] = ev.Subject
	}
	if !ev.Time.IsZero() {
		attributes["time"] = ev.Time.UTC().Format("2006-01-02T15:04:05.000000Z")
	}
	if ev.TraceParent != "" {
		attributes["traceparent"] = ev.TraceParent
	}
	if len(ev.Data) > 0 {
		attributes["datacontenttype"], attributes["data"] = "application/json", ev.Data
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(attributes); err != nil {
		return nil, errors.New("the payload is not JSON") // the encoder's error may quote it
	}
	return bytes.TrimSuffix(b.Bytes(), []byte{'\n'}), nil
}
