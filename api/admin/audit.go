package admin

import (
	"net/http"

	"posthaste/internal/audit"
)

// changes are all calls that change something, the console's too, and what posthaste_audit calls them. What is not here
// is not answered unless it reads: nothing changes without an entry.
var changes = map[string]string{
	"PUT /relay/mode":              audit.Mode,
	"POST /relay/dead/{id}/retry":  audit.DeadRetry,
	"DELETE /relay/dead/{id}":      audit.DeadDrop,
	"PUT /console/api/mode":        audit.Mode,
	"POST /console/api/dead/retry": audit.DeadRetry,
	"POST /console/api/dead/drop":  audit.DeadDrop,
}

// audited passes reads on, and changes with what notes them. It comes before everything that may refuse one.
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
		problem(w, http.StatusMethodNotAllowed, "nothing can be changed here")
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
