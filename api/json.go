package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"
)

// Bounds of a body besides MaxBody. A valid body has at most four members and no nesting.
const (
	maxNames = 64
	// maxFaults bounds the faults in a response.
	maxFaults = 20
)

// errManyNames means that a body has more members than maxNames.
var errManyNames = fmt.Errorf("has more than %d members", maxNames)

// decodeObject reads one JSON object strictly: valid UTF-8, no duplicate names, no trailing data. The values stay
// undecoded: no valid one contains another object. An object with too many members is valid JSON and fails validation.
func decodeObject(body []byte) (map[string]json.RawMessage, *problem) {
	var m map[string]json.RawMessage
	err := checkText(body)
	if err == nil {
		err = json.Unmarshal(body, &m)
	}
	switch {
	case errors.Is(err, errManyNames):
		return nil, &problem{kind: kindValidation, errors: []fieldError{{"", err.Error()}}}
	case err != nil:
		return nil, &problem{kind: kindInvalidJSON, detail: err.Error()}
	}
	return m, nil
}

// checkText refuses invalid JSON, and what encoding/json accepts: duplicate names and invalid UTF-8. It stops at
// errManyNames, which bounds its memory.
func checkText(body []byte) error {
	if !utf8.Valid(body) {
		return errors.New("the text is not UTF-8")
	}
	if !json.Valid(body) {
		return errors.New("the text is not JSON, or has data behind it")
	}
	if bytes.TrimLeft(body, " \t\r\n")[0] != '{' {
		return errors.New("the text is not a JSON object")
	}
	var names map[string]bool
	depth, next := 0, false // next: the next string is the name of a member
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '{', '[':
			depth++
			next = depth == 1
		case '}', ']':
			depth--
		case ',':
			next = depth == 1
		case '"':
			end := stringEnd(body, i)
			if next {
				var name string
				if err := json.Unmarshal(body[i:end], &name); err != nil {
					return errors.New("the text is not JSON")
				}
				switch {
				case len(names) == maxNames:
					return errManyNames
				case names[name]:
					return fmt.Errorf("the name %q occurs twice", clip(name))
				case names == nil:
					names = make(map[string]bool)
				}
				names[name] = true
			}
			next = false
			i = end - 1
		}
	}
	return nil
}

// stringEnd returns the position after the string that begins at i, in valid JSON.
func stringEnd(text []byte, i int) int {
	for i++; ; i++ {
		i += bytes.IndexAny(text[i:], `"\`)
		if text[i] == '"' {
			return i + 1
		}
		i++
	}
}

// fields reads the members of a body, and notes their faults.
type fields struct {
	unread map[string]json.RawMessage
	faults []fieldError
}

// take reads a member with set, which reports whether its value is valid; detail says which values are.
func (f *fields) take(name string, required bool, detail string, set func(raw json.RawMessage) bool) {
	raw, ok := f.unread[name]
	delete(f.unread, name)
	switch {
	case !ok && required:
		f.faults = append(f.faults, fieldError{"/" + name, "is required"})
	case ok && !set(raw):
		f.faults = append(f.faults, fieldError{"/" + name, detail})
	}
}

// problem returns the problem with the members, unknown ones included, or nil.
func (f *fields) problem() *problem {
	faults := f.faults
	for name := range f.unread {
		faults = append(faults, fieldError{"/" + pointerEscapes.Replace(clip(name)), "is not known"})
	}
	if len(faults) == 0 {
		return nil
	}
	sort.Slice(faults, func(i, j int) bool { return faults[i].Pointer < faults[j].Pointer })
	return &problem{kind: kindValidation, errors: faults[:min(len(faults), maxFaults)]}
}

// pointerEscapes are those of RFC 6901.
var pointerEscapes = strings.NewReplacer("~", "~0", "/", "~1")

// clip shortens a client's text for an error message.
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
