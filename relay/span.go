package relay

import "context"

// span holds the two contexts of an orderly stop. While intake lasts, new work is taken; while work lasts, the work
// that was taken is finished. Work never ends before intake has, and each ends with a cause.
type span struct{ intake, work context.Context }
