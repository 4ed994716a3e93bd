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

// Bounds of a body besides MaxBody. A valid body has at most four members and no nesting. An invalid body is read at
// most once.
const (
	maxDepth = 32
	// maxNames bounds the member names of a body, at all depths together.
	maxNames = 64
	// maxFaults bounds the faults in a response.
	maxFaults = 20
)

// errManyNames means that a body has more member names than maxNames.
var errManyNames = fmt.Errorf("has more than %d members", maxNames)

// decodeObject reads one JSON object strictly: valid UTF-8, no duplicate names at any depth, no trailing data. The
// values stay undecoded. An object with too many members is valid JSON and fails validation.
func decodeObject(body []byte) (map[string]json.RawMessage, *problem) {
	invalid := func(detail string) *problem { return &problem{kind: kindInvalidJSON, detail: detail} }
	// encoding/json accepts duplicate names, deep nesting and invalid UTF-8.
	if !utf8.Valid(body) {
		return nil, invalid("the text is not UTF-8")
	}
	if !json.Valid(body) {
		return nil, invalid("the text is not JSON, or has data behind it")
	}
	w := walker{text: body}
	if err := w.walk(); errors.Is(err, errManyNames) {
		return nil, &problem{kind: kindValidation, errors: []fieldError{{"", err.Error()}}}
	} else if err != nil {
		return nil, invalid(err.Error())
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(body, &m) != nil || m == nil {
		return nil, invalid("the text is not a JSON object")
	}
	return m, nil
}

// walker checks the member names of a text that is valid JSON. It stops at errManyNames, which bounds its memory.
type walker struct {
	text []byte
	// open are the containers around the current position.
	open [maxDepth]container
	// depth is the number of open containers, count the number of names so far.
	depth, count int
}

type container struct {
	object bool
	// name reports whether the next string is a member name.
	name  bool
	names map[string]bool
}

func (w *walker) walk() error {
	for i := 0; i < len(w.text); i++ {
		switch b := w.text[i]; b {
		case '{', '[':
			if w.depth == maxDepth {
				return errors.New("the text is nested too deeply")
			}
			w.open[w.depth] = container{object: b == '{', name: b == '{'}
			w.depth++
		case '}', ']':
			w.depth--
		case ',':
			in := &w.open[w.depth-1]
			in.name = in.object
		case '"':
			end := stringEnd(w.text, i)
			if err := w.str(w.text[i:end]); err != nil {
				return err
			}
			i = end - 1
		}
	}
	return nil
}

// str checks a quoted string.
func (w *walker) str(quoted []byte) error {
	if w.depth == 0 || !w.open[w.depth-1].name {
		return nil
	}
	in := &w.open[w.depth-1]
	in.name = false
	if w.count++; w.count > maxNames {
		return errManyNames
	}
	var name string
	if err := json.Unmarshal(quoted, &name); err != nil {
		return errors.New("the text is not JSON")
	}
	if in.names[name] {
		return fmt.Errorf("the name %q occurs twice", clip(name))
	}
	if in.names == nil {
		in.names = make(map[string]bool)
	}
	in.names[name] = true
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
	return strings.ToValidUTF8(s[:most], "") + "…"
}
