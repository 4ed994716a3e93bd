package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"
)

// hostile are bodies of MaxBody that are valid JSON and are refused.
func hostile() map[string]string {
	fill := func(open, shut string, part func(i int) string) string {
		var b strings.Builder
		b.WriteString(open)
		for i := 0; ; i++ {
			next := part(i)
			if i > 0 {
				next = "," + next
			}
			if b.Len()+len(next)+len(shut) > MaxBody {
				return b.String() + shut
			}
			b.WriteString(next)
		}
	}
	return map[string]string{
		"unknown members": fill("{", "}", func(i int) string { return fmt.Sprintf(`"%x":0`, i) }),
		"nested members":  fill(`{"x":{`, "}}", func(i int) string { return fmt.Sprintf(`"%x":0`, i) }),
		"objects":         fill(`{"x":[`, "]}", func(int) string { return "{}" }),
		"members each":    fill(`{"x":[`, "]}", func(int) string { return `{"":0}` }),
		"numbers":         fill(`{"amount":[`, "]}", func(int) string { return "1" }),
		"escapes":         fill(`{"x":"`, `"}`, func(int) string { return `\"` }),
		"one long name":   fill(`{"`, `":0}`, func(int) string { return "aaaa" }),
		"long names":      fill("{", "}", func(i int) string { return fmt.Sprintf(`"%01000x":0`, i) }),
	}
}

// Refusing a body costs little more than reading it, whatever it contains.
func TestRefusingABodyIsCheap(t *testing.T) {
	const most = 600
	for name, body := range hostile() {
		allocated := testing.AllocsPerRun(3, func() {
			if _, prob := decodeCommand([]byte(body), principal{any: true}); prob == nil {
				t.Errorf("%s: taken", name)
			}
			if _, prob := decodeCredits([]byte(body)); prob == nil {
				t.Errorf("%s: taken", name)
			}
		})
		if allocated > most {
			t.Errorf("%s: %.0f allocations, want %d at most", name, allocated, most)
		}
	}
}

// Too many members are a fault like any other, and reported together with other faults.
func TestTooManyMembers(t *testing.T) {
	t.Parallel()
	members := func(n int, last string) []byte {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"n%d":0,`, i)
		}
		return []byte("{" + b.String() + last + "}")
	}
	_, prob := decodeObject(members(maxNames-1, `"a":1`))
	if prob != nil {
		t.Errorf("%d members: %+v", maxNames, prob)
	}
	_, prob = decodeCommand(members(maxNames-1, `"a":1`), principal{any: true})
	if prob == nil || prob.kind != kindValidation || len(prob.errors) != maxFaults {
		t.Errorf("%d members: %+v", maxNames, prob)
	}
	_, prob = decodeObject(members(maxNames, `"a":1,"a":2`))
	if prob == nil || prob.kind != kindValidation || len(prob.errors) != 1 || prob.errors[0].Pointer != "" ||
		prob.errors[0].Detail != "has more than 64 members" {
		t.Errorf("more: %+v", prob)
	}
	// Invalid JSON is reported first.
	if _, prob = decodeObject(members(maxNames, `"a":`)); prob == nil || prob.kind != kindInvalidJSON {
		t.Errorf("no JSON: %+v", prob)
	}
}

// FuzzDecodeObject compares the reader with a slow one that walks the text token by token, without bounds.
func FuzzDecodeObject(f *testing.F) {
	for _, seed := range []string{
		"", "null", "[]", "{}", "{}{}", `{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"x":{"a":1,"b":[{"a":1,"a":[]}]}}`,
		`{"a":"\"\\","b":"{\"a\":[,"}`, `{"a":["b","b",{"b":"b"}],"b":[[]]}`, "{\"\xff\":1}", `{"\ud800":1,"\udfff":1}`,
		strings.Repeat("[", 40) + strings.Repeat("]", 40), orderJSON(1), " {\n\t\"a\" : 1 } ",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, prob := decodeObject(body)
		names, err := slowly(body)
		if prob != nil && prob.kind == kindValidation {
			if names <= maxNames {
				t.Fatalf("%q: %d names are too many", body, names)
			}
			return
		}
		if (prob == nil) != (err == nil && names <= maxNames) {
			t.Fatalf("%q: %+v, the slow reader says %v", body, prob, err)
		}
		if prob == nil && m == nil {
			t.Fatalf("%q: no members", body)
		}
	})
}

// slowly counts the names in a strict JSON object.
func slowly(body []byte) (int, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	names := 0
	var value func(depth int) error
	value = func(depth int) error {
		token, err := d.Token()
		if err != nil {
			return err
		}
		open, ok := token.(json.Delim)
		if !ok {
			return nil
		}
		if depth >= maxDepth {
			return errors.New("nested too deeply")
		}
		seen := make(map[string]bool)
		for d.More() {
			if open == '{' {
				name, err := d.Token()
				if err != nil {
					return err
				}
				if seen[name.(string)] {
					return errors.New("twice")
				}
				names++
				seen[name.(string)] = true
			}
			if err := value(depth + 1); err != nil {
				return err
			}
		}
		_, err = d.Token()
		return err
	}
	if err := value(0); err != nil {
		return names, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return names, errors.New("data behind it")
	}
	if !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) || !json.Valid(body) {
		return names, errors.New("no object")
	}
	if !utf8.Valid(body) {
		return names, errors.New("not UTF-8")
	}
	return names, nil
}
