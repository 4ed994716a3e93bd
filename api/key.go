package api

import (
	"errors"
	"net/http"
	"time"

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

// mintedAt returns the time in a key that is a UUIDv7, otherwise zero.
func mintedAt(key string) time.Time {
	id, ok := uuidOf(key)
	if !ok || id.Version() != 7 {
		return time.Time{}
	}
	sec, nsec := id.Time().UnixTime()
	return time.Unix(sec, nsec)
}
