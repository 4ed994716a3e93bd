package idem

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
)

// Key names one idempotent operation: 16 bytes of a SHA-256 over the client's key and everything that scopes it. The
// client's key cannot be recovered from it, and cannot collide with another user's or route's.
type Key [16]byte

// NewKey hashes the parts of a key's scope and the key itself, for example tenant, user, method, route, key. Each part
// is prefixed with its length, so no two lists of parts give the same input.
func NewKey(parts ...string) Key {
	sum := digest(parts)
	return Key(sum[:16])
}

// String returns the name of the key's record in Redis.
func (k Key) String() string { return "i:" + base64.RawURLEncoding.EncodeToString(k[:]) }

// In returns the key under which the guard keeps the record of k's operation in an incarnation of a database; k itself
// if that is "".
func (k Key) In(incarnation string) Key {
	if incarnation == "" {
		return k
	}
	return NewKey(incarnation, string(k[:]))
}

// Fingerprint identifies a command: a version byte, then 16 bytes of a SHA-256 over the decoded and validated command.
type Fingerprint [17]byte

// NewFingerprint hashes the parts of a command. version names their encoding: raise it when the encoding changes.
func NewFingerprint(version byte, parts ...string) Fingerprint {
	sum := digest(parts)
	var f Fingerprint
	f[0] = version
	copy(f[1:], sum[:16])
	return f
}

// Version returns the encoding's version.
func (f Fingerprint) Version() byte { return f[0] }

// comparable reports whether text is a fingerprint of the same encoding.
func (f Fingerprint) comparable(text string) bool {
	b, err := base64.RawURLEncoding.DecodeString(text)
	return err == nil && len(b) == len(f) && b[0] == f.Version()
}

func (f Fingerprint) text() string { return base64.RawURLEncoding.EncodeToString(f[:]) }

func digest(parts []string) [sha256.Size]byte {
	var buf []byte
	for _, p := range parts {
		buf = binary.AppendUvarint(buf, uint64(len(p)))
		buf = append(buf, p...)
	}
	return sha256.Sum256(buf)
}
