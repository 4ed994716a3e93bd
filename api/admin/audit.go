package admin

import (
	"net/http"

	"posthaste/internal/audit"
)

// changes maps every call that changes something, including the console's, to its action in posthaste_audit. A call
// that is not listed must be a read, or it is refused, so every change has an entry.
var changes = map[string]string{
	"PUT /relay/mode":              audit.Mode,
	"POST /relay/dead/{id}/retry":  audit.DeadRetry,
	"DELETE /relay/dead/{id}":      audit.DeadDrop,
	"PUT /console/api/mode":        audit.Mode,
	"POST /console/api/dead/retry": audit.DeadRetry,
	"POST /console/api/dead/drop":  audit.DeadDrop,
}

// audited records changes and passes on reads. It wraps everything that may refuse a change.
func (s *server) audited(next http.Handler) http.Handler {
	mux := http.NewServeMux()
	for pattern, action := range changes {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			args := audit.Detail{}
			if id, err := deadID(r.PathValue("id")); err == nil {
				args["ids"] = []string{id.String()}
			}
			s.trail.Serve(w, r, next, audit.Who{Actor: s.role(r), Source: r.RemoteAddr}, action, args)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		Problem(w, http.StatusMethodNotAllowed, "nothing can be changed here")
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
			next.ServeHTTP(w, r)
		default:
			mux.ServeHTTP(w, r)
		}
	})
}
