package console

import (
	"strings"

	"posthaste/sink"
)

// notAStream reports whether err means that a key has another type. Events for that key are dead, and shown as such.
func notAStream(err error) bool { return sink.Class(err) == "wrongtype" }

func integer(v any) int64 {
	n, _ := v.(int64)
	return n
}

// str returns a text from Redis as valid UTF-8.
func str(v any) string {
	s, _ := v.(string)
	return strings.ToValidUTF8(s, "?")
}
