package credits

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"

	"github.com/google/uuid"
)

// Buckets is the number of streams that the accounts are spread over. It can never change.
const Buckets = 256

// Bucket returns the bucket of a user.
func Bucket(user uuid.UUID) int16 {
	sum := sha256.Sum256(user[:])
	return int16(sum[0])
}

// tag returns the hash tag in every key of a bucket. Redis Cluster keeps keys with the same tag on one node.
func tag(bucket int16) string { return tags[bucket] }

var tags = func() (t [Buckets]string) {
	for b := range t {
		t[b] = fmt.Sprintf("{cr:%03d}", b)
	}
	return t
}()

// ownerKey has the source of the database that the balances belong to. The same source owns the gates of the streams.
const ownerKey = "{cr:owner}"

func streamKey(bucket int16) string { return tag(bucket) + ":s" }
func epochKey(bucket int16) string  { return tag(bucket) + ":ep" }

func accountKey(user uuid.UUID) string { return tag(Bucket(user)) + ":a:" + user.String() }
func lockKey(user uuid.UUID) string    { return tag(Bucket(user)) + ":l:" + user.String() }

// outcomeKeyIn hashes the user together with the operation, because two users may have operations with the same id.
func outcomeKeyIn(bucket int16, user, op uuid.UUID) string {
	sum := sha256.Sum256(slices.Concat(user[:], op[:]))
	return tag(bucket) + ":i:" + base64.RawURLEncoding.EncodeToString(sum[:16])
}

// OpID returns an operation's id for a hash of its idempotency key. It is a UUID of version 8, which applications may
// define themselves.
func OpID(hash [16]byte) uuid.UUID {
	id := uuid.UUID(hash)
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}
