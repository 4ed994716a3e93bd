package credits

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	"github.com/google/uuid"
)

// Buckets is how many streams the accounts are spread over. It can never change.
const Buckets = 256

// Bucket returns the bucket of a user.
func Bucket(user uuid.UUID) int16 {
	sum := sha256.Sum256(user[:])
	return int16(sum[0])
}

// tag is in every key of a bucket, so that Redis Cluster keeps them on one node.
func tag(bucket int16) string { return tags[bucket] }

var tags = func() (t [Buckets]string) {
	for b := range t {
		t[b] = fmt.Sprintf("{cr:%03d}", b)
	}
	return t
}()

// ownerKey names the database that the balances are of, by the source that also owns the streams' gates.
const ownerKey = "{cr:owner}"

func streamKey(bucket int16) string { return tag(bucket) + ":s" }
func epochKey(bucket int16) string  { return tag(bucket) + ":ep" }

func accountKey(user uuid.UUID) string { return tag(Bucket(user)) + ":a:" + user.String() }
func lockKey(user uuid.UUID) string    { return tag(Bucket(user)) + ":l:" + user.String() }

func outcomeKey(user, op uuid.UUID) string { return outcomeKeyIn(Bucket(user), user, op) }

// outcomeKeyIn hashes user and operation together: an id belongs to its user, and two users may have the same one.
func outcomeKeyIn(bucket int16, user, op uuid.UUID) string {
	var both [32]byte
	copy(both[:16], user[:])
	copy(both[16:], op[:])
	sum := sha256.Sum256(both[:])
	return tag(bucket) + ":i:" + base64.RawURLEncoding.EncodeToString(sum[:16])
}

// OpID makes an operation's id of a hash of its idempotency key: a UUID of version 8, which says that it is the
// application's own.
func OpID(hash [16]byte) uuid.UUID {
	id := uuid.UUID(hash)
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}
