package api

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Scope is a permission of an API key.
type Scope string

// The scopes. A key that lists none has all permissions of its user.
const (
	// ScopeRead reads orders and balances, ScopeOrder places orders, ScopeCredit spends credits (also for an order),
	// ScopeMint creates them and needs a key for any user.
	ScopeRead   Scope = "read"
	ScopeOrder  Scope = "order"
	ScopeCredit Scope = "credit"
	ScopeMint   Scope = "mint"
)

var scopes = []Scope{ScopeRead, ScopeOrder, ScopeCredit, ScopeMint}

type keyHash [sha256.Size]byte

type apiKey struct {
	hash keyHash
	who  principal
	// name is for logs. It may be empty.
	name string
	// expires is when the key expires; zero: never.
	expires time.Time
}

// keySet maps the hashes of keys to keys. The time of a lookup does not reveal keys: a client cannot choose the hash.
type keySet map[keyHash]*apiKey

// Keys are the API keys that may use the API. Only their SHA-256 is stored: keys are long and random, so a slow hash
// would protect nothing. Safe for concurrent use.
type Keys struct {
	set atomic.Pointer[keySet]
	// file is the source of the keys, or nil.
	file *watchedFile
}

// LoadKeys reads a file of keys; see ParseKeys. It refuses a file that others than its owner and group may write to.
func LoadKeys(path string) (*Keys, error) {
	k := &Keys{}
	k.file = &watchedFile{path: path, what: "file of API keys", take: k.take}
	return k, k.Reload()
}

// ParseKeys reads one key per line: the SHA-256 of the key in hexadecimal, and the id of its user, or * for a key that
// may act for any user. Optional fields follow in any order: name=… for logs, scopes=… separated by commas, and
// expires=…, a date or a time in RFC 3339. Empty lines and lines that start with # are skipped. Errors name the line,
// never its content. A file without keys is an error because it would refuse all clients. The hash of an empty key is
// an error because it would admit all clients.
func ParseKeys(r io.Reader) (*Keys, error) {
	k := &Keys{}
	if _, err := k.take(r); err != nil {
		return nil, err
	}
	return k, nil
}

// take replaces the keys by those of a file, and returns their number.
func (k *Keys) take(r io.Reader) (int, error) {
	set, err := parseKeys(r)
	if err != nil {
		return 0, err
	}
	k.set.Store(&set)
	return len(set), nil
}

// Reload reads the file again. On an error the keys do not change.
func (k *Keys) Reload() error {
	if k.file == nil {
		return nil
	}
	_, err := k.file.load()
	return err
}

// run reloads the file when it changes, until ctx ends.
func (k *Keys) run(ctx context.Context, log *slog.Logger) {
	if k.file == nil {
		return
	}
	if s := k.file.seen.Load(); s != nil && s.mode.Perm()&0o004 != 0 {
		log.Warn("the file of API keys is readable by all users of this machine; chmod o-r it", "mode", s.mode.String())
	}
	k.file.run(ctx, log)
}

// caller returns the sender with a key.
func (k *Keys) caller(credential string) (caller, *problem) {
	key := (*k.set.Load())[sha256.Sum256([]byte(credential))]
	switch {
	case credential == "" || key == nil:
		return caller{}, refuse401("")
	case !key.expires.IsZero() && !time.Now().Before(key.expires):
		return caller{}, refuse401("the key has expired")
	}
	return caller{key.who, key.name, key.hash}, nil
}

func parseKeys(r io.Reader) (keySet, error) {
	set := make(keySet)
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		key, err := parseAPIKey(line)
		if err == nil && set[key.hash] != nil {
			err = errors.New("the key has a line already")
		}
		if err != nil {
			return nil, fmt.Errorf("file of API keys, line %d: %w", n, err)
		}
		set[key.hash] = key
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the file of API keys: %w", err)
	}
	if len(set) == 0 {
		return nil, errors.New("the file of API keys has no keys")
	}
	return set, nil
}

func parseAPIKey(line string) (*apiKey, error) {
	f := strings.Fields(line)
	if len(f) < 2 {
		return nil, errors.New("want a SHA-256 in hexadecimal and a user id")
	}
	k := &apiKey{}
	hash, err := hex.DecodeString(f[0])
	if err != nil || len(hash) != len(k.hash) {
		return nil, errors.New("the first field is not a SHA-256 in hexadecimal")
	}
	if k.hash = keyHash(hash); k.hash == sha256.Sum256(nil) {
		return nil, errors.New("that is the hash of an empty key, which would admit all clients")
	}
	if k.who.any = f[1] == "*"; !k.who.any {
		var ok bool
		if k.who.user, ok = uuidOf(f[1]); !ok {
			return nil, errors.New("the second field is neither a user id nor *")
		}
	}
	given := map[string]bool{}
	for _, field := range f[2:] {
		name, value, _ := strings.Cut(field, "=")
		if given[name] {
			return nil, errors.New("a field is given twice")
		}
		given[name] = true
		if err := k.field(name, value); err != nil {
			return nil, err
		}
	}
	return k, nil
}

var keyName = regexp.MustCompile(`^[a-zA-Z0-9_.@:-]+$`)

func isKeyName(s string) bool { return len(s) <= 64 && keyName.MatchString(s) }

// field reads one of the optional fields.
func (k *apiKey) field(name, value string) (err error) {
	switch name {
	case "name":
		if k.name = value; !isKeyName(value) {
			return errors.New("a name has 1 to 64 letters, digits and the characters _.@:-")
		}
	case "scopes":
		k.who.scopes, err = parseScopes(value, k.who.any)
	case "expires":
		if k.expires, err = time.Parse(time.RFC3339, value); err != nil {
			k.expires, err = time.Parse(time.DateOnly, value)
		}
		if err != nil {
			return errors.New("expires is neither a date nor a time in RFC 3339")
		}
	default:
		return errors.New("behind the user there may be name=, scopes= and expires=")
	}
	return err
}

func parseScopes(value string, anyUser bool) ([]Scope, error) {
	var list []Scope
	for s := range strings.SplitSeq(value, ",") {
		if !slices.Contains(scopes, Scope(s)) {
			return nil, errors.New("the scopes are read, order, credit and mint, separated by commas")
		}
		list = append(list, Scope(s))
	}
	if !anyUser && slices.Contains(list, ScopeMint) {
		return nil, errors.New("only a key for any user (*) may mint")
	}
	return list, nil
}
