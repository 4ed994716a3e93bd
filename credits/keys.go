package credits

import (
	"crypto/sha256"
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
func tag(bucket int16) string { return fmt.Sprintf("{cr:%03d}", bucket) }

func streamKey(bucket int16) string { return tag(bucket) + ":s" }
func epochKey(bucket int16) string  { return tag(bucket) + ":ep" }

func accountKey(user uuid.UUID) string { return tag(Bucket(user)) + ":a:" + user.String() }
func lockKey(user uuid.UUID) string    { return tag(Bucket(user)) + ":l:" + user.String() }

func outcomeKey(user, op uuid.UUID) string { return tag(Bucket(user)) + ":i:" + op.String() }

// OpID makes an operation's id of a hash of its idempotency key: a UUID of version 8, which says that it is the
// application's own.
func OpID(hash [16]byte) uuid.UUID {
	id := uuid.UUID(hash)
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}
