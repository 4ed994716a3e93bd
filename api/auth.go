package api

import (
	"bufio"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
)

// principal is who a request acts for.
type principal struct {
	// any: every user. The request names one.
	any  bool
	user uuid.UUID
}

func (p principal) may(user uuid.UUID) bool { return p.any || p.user == user }

// Keys are the API keys that may use the API. Only their SHA-256 is known here: keys are random and long, so a slow
// hash would protect nothing.
type Keys struct{ list []apiKey }

type apiKey struct {
	hash [sha256.Size]byte
	who  principal
}

// LoadKeys reads a file of keys; see ParseKeys.
func LoadKeys(path string) (*Keys, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the file of API keys: %w", err)
	}
	defer func() { _ = f.Close() }()
	return ParseKeys(f)
}

// ParseKeys reads one key per line: the SHA-256 of the key in hexadecimal, a space, and the id of the user it stands
// for, or * for a key that may act for any user. Empty lines and lines that start with # are skipped. Errors name the
// line, never its content. A file without keys is an error: it would lock everybody out.
func ParseKeys(r io.Reader) (*Keys, error) {
	var k Keys
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		key, err := parseAPIKey(line)
		if err != nil {
			return nil, fmt.Errorf("file of API keys, line %d: %w", n, err)
		}
		k.list = append(k.list, key)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the file of API keys: %w", err)
	}
	if len(k.list) == 0 {
		return nil, errors.New("the file of API keys has no keys")
	}
	return &k, nil
}

func parseAPIKey(line string) (apiKey, error) {
	var k apiKey
	f := strings.Fields(line)
	if len(f) != 2 {
		return k, errors.New("want a SHA-256 in hexadecimal and a user id")
	}
	hash, err := hex.DecodeString(f[0])
	if err != nil || len(hash) != len(k.hash) {
		return k, errors.New("the first field is not a SHA-256 in hexadecimal")
	}
	copy(k.hash[:], hash)
	if f[1] == "*" {
		k.who = principal{any: true}
		return k, nil
	}
	user, ok := uuidOf(f[1])
	if !ok {
		return k, errors.New("the second field is neither a user id nor *")
	}
	k.who = principal{user: user}
	return k, nil
}

// find returns the place of a key, or -1. It compares with every key in constant time, so that the time it takes tells
// nothing about any of them.
func (k *Keys) find(key string) int {
	hash := sha256.Sum256([]byte(key))
	found := -1
	for i := range k.list {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(hash[:], k.list[i].hash[:]), i, found)
	}
	return found
}

// authenticate finds out who asks, and holds the rate limit against it. Both come before the guard: what they refuse
// stores nothing.
func (s *Server) authenticate(c *gin.Context) {
	i := 0
	if s.keys == nil {
		exchangeOf(c).who = principal{any: true}
	} else {
		if i = s.keys.find(bearer(c)); i < 0 {
			c.Header("WWW-Authenticate", `Bearer realm="posthaste"`)
			writeProblem(c, &problem{kind: kindUnauthorized})
			return
		}
		exchangeOf(c).who = s.keys.list[i].who
	}
	if s.limits == nil {
		return
	}
	if wait := spend(s.limits[i]); wait > 0 {
		writeProblem(c, &problem{kind: kindRateLimited, retryAfter: wait})
	}
}

// bearer returns the request's bearer token, "" if it has none or several.
func bearer(c *gin.Context) string {
	lines := c.Request.Header.Values("Authorization")
	if len(lines) != 1 {
		return ""
	}
	scheme, token, _ := strings.Cut(lines[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
