package jetstream

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
)

// ParseURL returns the options in addresses of servers, which are separated by commas. Their parameters name files with
// credentials, creds=FILE, or with a seed, nkey=FILE, and the domain of JetStream, domain=NAME.
func ParseURL(addresses string) (o Options, err error) {
	var list []string
	for _, address := range strings.Split(addresses, ",") {
		u, err := url.Parse(strings.TrimSpace(address))
		if err != nil || !slices.Contains([]string{"nats", "tls"}, u.Scheme) || u.Host == "" {
			return o, errors.New("an address is nats://host:port or tls://host:port")
		}
		for name, values := range u.Query() {
			switch name {
			case "creds":
				o.Connection = append(o.Connection, nats.UserCredentials(values[0]))
			case "nkey":
				option, err := nats.NkeyOptionFromSeed(values[0])
				if err != nil {
					return o, fmt.Errorf("the seed of nkey: %w", err)
				}
				o.Connection = append(o.Connection, option)
			case "domain":
				if o.Domain = values[0]; o.Domain == "" || strings.ContainsAny(o.Domain, ".*> \t") {
					return o, errors.New("a domain is one token of a subject")
				}
			default:
				return o, fmt.Errorf("parameters of an address are creds, nkey and domain, not %s", name)
			}
		}
		u.RawQuery = ""
		list = append(list, u.String())
	}
	o.URL = strings.Join(list, ",")
	return o, nil
}
