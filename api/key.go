package api

import (
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"

	"posthaste/idem"
)

func parseKey(h http.Header) (string, *problem) {
	key, err := idem.ParseKey(h)
	switch {
	case err == nil:
		return key, nil
	case errors.Is(err, idem.ErrKeyMissing):
		return "", &problem{kind: kindKeyMissing}
	default:
		return "", &problem{kind: kindKeyInvalid, detail: err.Error()}
	}
}

// mintedAt returns the time in a key that is a UUIDv7.
func mintedAt(key string) (time.Time, bool) {
	if len(key) != 36 {
		return time.Time{}, false
	}
	id, err := uuid.Parse(key)
	if err != nil || id.Version() != 7 {
		return time.Time{}, false
	}
	sec, nsec := id.Time().UnixTime()
	return time.Unix(sec, nsec), true
}
