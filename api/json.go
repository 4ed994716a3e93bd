package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a body. Nothing we accept is nested at all.
const maxDepth = 32

// decodeObject reads one JSON object, strictly: no duplicate names at any depth, valid UTF-8, nothing behind it. The
// values are left as they were written.
func decodeObject(body []byte) (map[string]json.RawMessage, error) {
	if !utf8.Valid(body) {
		return nil, errors.New("the text is not UTF-8")
	}
	if err := checkNames(body); err != nil {
		return nil, err
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, errors.New("the text is not a JSON object")
	}
	if m == nil {
		return nil, errors.New("the text is not a JSON object")
	}
	return m, nil
}

// checkNames walks the text once and refuses what encoding/json would let pass: duplicate names, trailing data, depth.
func checkNames(body []byte) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	w := walker{d: d}
	if err := w.value(0); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is data behind the JSON object")
	}
	return nil
}

type walker struct{ d *json.Decoder }

func (w walker) value(depth int) error {
	if depth > maxDepth {
		return errors.New("the text is nested too deeply")
	}
	t, err := w.d.Token()
	if err != nil {
		return errors.New("the text is not JSON")
	}
	switch t {
	case json.Delim('{'):
		return w.members(depth, make(map[string]bool))
	case json.Delim('['):
		return w.members(depth, nil)
	}
	return nil
}

// members reads up to the closing delimiter; names is nil in an array.
func (w walker) members(depth int, names map[string]bool) error {
	for w.d.More() {
		if names != nil {
			t, err := w.d.Token()
			if err != nil {
				return errors.New("the text is not JSON")
			}
			name, _ := t.(string)
			if names[name] {
				return fmt.Errorf("the name %q occurs twice", clip(name))
			}
			names[name] = true
		}
		if err := w.value(depth + 1); err != nil {
			return err
		}
	}
	if _, err := w.d.Token(); err != nil {
		return errors.New("the text is not JSON")
	}
	return nil
}

// clip keeps what a client sent from filling an error text.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	s = s[:most]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s + "…"
}
